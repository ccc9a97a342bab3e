"""`stability-probe demo`: a real divergence, announced before the loss shows it."""
