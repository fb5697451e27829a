"""Prints the requirements of keepstep and its tests, one per line, for `make test-torch`.

Torch is not among them, nor torchtitan, which needs the newest one.
"""

import tomllib
from pathlib import Path

if __name__ == "__main__":
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = project["dependencies"] + project["optional-dependencies"]["dev"]
    print("\n".join(each for each in needed if not each.startswith(("torch>", "torch=", "torchtitan"))))
