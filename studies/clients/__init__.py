"""Clients of others run against the server, each with one question that needs a tool."""
