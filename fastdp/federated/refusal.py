"""The one kind of error whose words may leave a client."""

from __future__ import annotations


class ClientRefusal(ValueError):
    """Why a client does not take part, in a sentence that quotes nothing of its texts: the server may read it.

    Raise it only for sentences made of the server's own settings, names of tensors and the client's number. Every other error
    of a client, whoever raised it, is reported by its type alone.
    """
