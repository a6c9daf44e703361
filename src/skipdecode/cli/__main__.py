"""`python -m skipdecode.cli`."""

import sys

from skipdecode.cli import main

sys.exit(main())
