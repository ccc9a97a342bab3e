"""The parts of the coverage sweep: tiny models, and an oracle that judges the probe."""
