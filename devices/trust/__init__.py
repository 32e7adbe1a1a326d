"""Who belongs to a cluster: the authority, certificates, invitations and members."""
