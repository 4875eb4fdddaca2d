"""`baton check`: prove on the user's own model that two tiers give token for token what one process
gives."""
