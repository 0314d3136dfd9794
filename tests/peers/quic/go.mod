module culvert.local/quic

go 1.26.2

require github.com/quic-go/quic-go v0.64.1

require (
	golang.org/x/crypto v0.54.0 // indirect
	golang.org/x/net v0.56.0 // indirect
	golang.org/x/sys v0.47.0 // indirect
)
