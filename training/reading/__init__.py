"""Reading other people's files: tables, documents, pairs, images; splits, bad records, streams and the cache."""
