"""Install packages and engines: the part of the noxfile that its sessions share."""
