"""A cluster on one machine: nodes as network namespaces, with slow links of real kernel queues."""
