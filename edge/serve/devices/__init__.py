"""The devices of a server: their state, invitations, and devices that a person leaves out."""
