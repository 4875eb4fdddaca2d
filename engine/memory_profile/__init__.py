"""Where memory goes, recorded and drawn: `baton profile-memory`."""
