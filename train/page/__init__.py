"""Parts of pages: charts, tables and a style sheet, in self-contained HTML."""
