"""What runs on the laptop: one local address for whichever VM is up, and an MCP server that demonstrates it.

Above `rig`, `page` and `server.notify`, which know nothing of it. Knows no model.
"""
