"""forge timed beside other implementations: ``python -m forge bench`` and ``make bench``."""
