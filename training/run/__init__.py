"""The folder of a run: its settings, fingerprint, files and checkpoints."""
