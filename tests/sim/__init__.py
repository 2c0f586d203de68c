"""The deterministic world: the real controller and agents on a virtual clock, a seeded network and seeded faults."""
