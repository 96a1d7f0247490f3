"""What makes a run private: its method, sampler, ledger, releases and checks, joined to the engine."""
