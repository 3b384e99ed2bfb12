"""The accounting core: ledger, admission history and retention classes. Pure standard library."""
