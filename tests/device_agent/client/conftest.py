"""The server that tests of the client talk to."""

from scripted_http import server as server
