"""Process groups, communication streams, rendezvous, timers, counters and user errors."""
