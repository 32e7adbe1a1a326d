"""Membership of a cluster: the authority, certificates, invitations and members."""
