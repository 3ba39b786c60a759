"""Authenticated connections: both ends prove that they have the job's secret.

Workers, launchers on several machines and islands connect through this package, which
does not import TensorFlow. Reading order:
    handshake: messages and checks of both ends, run over a socket or a stream
    acceptor: thread that accepts connections, with limits on unauthenticated ones
"""
