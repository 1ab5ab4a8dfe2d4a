from everfed.cli import main

main()
