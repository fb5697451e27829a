"""The checkout that a benchmark belongs to. A benchmark that imports this can import ``tests``, run from any folder."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
