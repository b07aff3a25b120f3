"""The page for the node's owner: `server` serves it over HTTP, `page/` is what the browser gets."""
