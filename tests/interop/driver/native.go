package main

import (
	"bufio"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
)

// The native transport of Culvert's own programs, by an HTTP/2 library that they
// do not use: after TLS and one HTTP/1.1 upgrade the server is the HTTP/2 client.
const (
	nativeALPN    = "culvert/1"
	nativeControl = "/control"
	nativeDrain   = "drain"
	nativeError   = "culvert-error"
)

// aheadConn reads what the upgrade's reader has read ahead first.
type aheadConn struct {
	net.Conn
	in *bufio.Reader
}

func (c *aheadConn) Read(b []byte) (int, error) { return c.in.Read(b) }

// nativeFlags are the flags that both ends have.
type nativeFlags struct{ addr, ca, cert, key string }

func (f *nativeFlags) add(fs *flag.FlagSet) {
	fs.StringVar(&f.addr, "addr", "", "HOST:PORT to connect to or to listen on")
	fs.StringVar(&f.ca, "ca", "", "file with the CA of the other end")
	fs.StringVar(&f.cert, "cert", "", "certificate file")
	fs.StringVar(&f.key, "key", "", "key file")
}

// tls offers the native protocol alone, as either end.
func (f *nativeFlags) tls() (*tls.Config, error) {
	pem, err := os.ReadFile(f.ca)
	if err != nil {
		return nil, fmt.Errorf("--ca: %w", err)
	}
	pair, err := tls.LoadX509KeyPair(f.cert, f.key)
	if err != nil {
		return nil, fmt.Errorf("--cert, --key: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, errors.New("--ca: no certificate found")
	}
	return &tls.Config{
		RootCAs: pool, ClientCAs: pool, ClientAuth: tls.RequireAndVerifyClientCert,
		Certificates: []tls.Certificate{pair}, NextProtos: []string{nativeALPN},
	}, nil
}
