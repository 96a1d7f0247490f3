"""Private votes: private records vote for candidates that a model behind an API wrote; the counts are released with noise."""

from fastdp.methods.votes.evolution import evolve as evolve
from fastdp.methods.votes.mechanism import PrivateVotes as PrivateVotes, vote_counts as vote_counts
