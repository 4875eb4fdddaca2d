"""`python -m baton`: the same as the command `baton`."""

from baton.cli.main import app

if __name__ == "__main__":
    app(prog_name="baton")
