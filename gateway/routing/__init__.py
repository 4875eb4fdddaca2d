"""Which workers a sequence goes to: who there is, who has room, and who waits."""
