"""Authenticated connections: both ends prove that they have the job's secret.

Workers, the launchers of several machines and islands all connect by this room, which
imports no TensorFlow. Reading order:
    handshake: what both ends send and check, and how it is run over a socket
    acceptor: thread that accepts connections, with limits on unauthenticated ones
"""
