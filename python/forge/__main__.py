"""``python -m forge``: see ``python -m forge --help``."""

import sys

from forge._cli import main

sys.exit(main())
