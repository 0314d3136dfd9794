module culvert.test/pods

go 1.24
