"""The parts of the coverage sweep: tiny models of every type, and an oracle that judges the probe."""
