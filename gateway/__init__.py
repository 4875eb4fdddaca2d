"""The front door: validate, tokenize, admit, route, stream, resume. No torch."""
