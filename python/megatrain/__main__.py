"""`python -m megatrain`: the command line."""

import sys

from megatrain.cli import main

sys.exit(main())
