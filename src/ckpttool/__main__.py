"""``python -m ckpttool``."""

from ckpttool.cli import entry

if __name__ == "__main__":
    entry()
