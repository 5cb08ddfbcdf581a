"""MAX graphs of our Mojo ops. Importing this package imports nothing of MAX; its modules do."""
