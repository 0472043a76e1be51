"""``python -P -m kvrelay``: how kvrelay starts its own processes, which end when their starter does."""

from kvrelay.cli import app
from kvrelay.deploy.parent import die_with_starter

if __name__ == "__main__":
    die_with_starter()
    app(prog_name="kvrelay")
