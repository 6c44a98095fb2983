"""The order in which what is ready at one time goes on."""
