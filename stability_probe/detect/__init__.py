"""Small detectors over arrays. NumPy only; they know nothing of records, rules or files."""
