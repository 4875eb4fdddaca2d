"""The front door: validate, tokenize, admit, route, relay, resume. No torch."""
