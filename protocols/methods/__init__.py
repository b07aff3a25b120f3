"""The ways to train together, a folder each, behind one interface (`method.py`)."""
