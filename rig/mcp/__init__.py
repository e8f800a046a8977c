"""The rig's tools for an MCP client. Above everything else in `rig`, which knows nothing of MCP."""
