"""Routes: ways to run one model, behind one protocol."""
