"""Rules that turn a run's records into alerts, and the episodes that these belong to."""
