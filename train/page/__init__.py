"""Parts of pages: charts, tables and a style sheet, in HTML that needs nothing beside itself."""
