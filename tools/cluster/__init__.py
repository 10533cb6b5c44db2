"""A cluster on one machine: nodes as network namespaces, with links shaped by kernel queues."""
