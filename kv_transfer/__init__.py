"""KV transfer between workers: tickets, frames, sender, receiver and transports."""
