"""Looking after a store from outside: what lies there, and is it whole."""
