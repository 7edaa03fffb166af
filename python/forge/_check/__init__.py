"""What ``python -m forge check`` runs, its problems, and plain NumPy to hold results against."""
