"""`baton check`: verifies on the user's model that two tiers produce the same tokens as one
process."""
