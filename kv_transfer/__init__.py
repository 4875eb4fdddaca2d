"""The KV channel: tickets, frames, sender, receiver and the transports between them."""
