"""The gateway: validates, tokenizes, admits, routes, streams and resumes requests. No torch."""
