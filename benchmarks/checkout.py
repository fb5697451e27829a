"""The checkout that a benchmark belongs to. Who imports this can import ``tests``, from whatever folder it runs."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
